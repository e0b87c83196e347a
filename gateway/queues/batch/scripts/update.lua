-- A job in place of itself, if nobody else changed it meanwhile.
-- KEYS     the beginning of all keys
-- ARGV     job, the version that is changed, JSON
-- returns  whether it is kept
local key = KEYS[1] .. 'job:' .. ARGV[1]
if redis.call('HGET', key, 'version') ~= ARGV[2] then
  return 0
end
redis.call('HSET', key, 'version', ARGV[2] + 1, 'json', ARGV[3])
return 1
