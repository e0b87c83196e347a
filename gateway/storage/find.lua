-- ARGV     ..., 1 if that is a use, which moves its eviction
-- returns  the body; nil without one
local body = redis.call('GET', bodies .. key)
if not body or is_over(key) then
  return nil
end
if ARGV[3] == '1' then
  redis.pcall('ZADD', used, 'XX', now, key) -- a Redis that is full refuses it
end
return body
