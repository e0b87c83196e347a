-- Deletes a body. Returns 1 if it was there, else 0.
-- KEYS  as in put.lua
-- ARGV  id
local size = redis.call('HGET', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
if size then
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('HINCRBY', KEYS[2], '', 0 - tonumber(size))
end
return redis.call('DEL', KEYS[3] .. ARGV[1])
