-- KEYS     the beginning of all keys
-- ARGV     job
local prefix, key = KEYS[1], KEYS[1] .. 'job:' .. ARGV[1]
local tenant, dialect = unpack(redis.call('HMGET', key, 'tenant', 'dialect'))
if not tenant then
  return
end
if redis.call('SREM', prefix .. 'open', ARGV[1]) == 1 then
  redis.call('HINCRBY', prefix .. 'quota', 'jobs:' .. tenant, -1)
  redis.call('HINCRBY', prefix .. 'quota', 'lines:' .. tenant, 0 - tonumber(redis.call('HGET', key, 'lines')))
end
redis.call('ZREM', prefix .. 'ended', ARGV[1])
redis.call('ZREM', prefix .. 'of:' .. dialect .. ':' .. tenant, ARGV[1])
redis.call('HDEL', prefix .. 'leases', ARGV[1])
redis.call('DEL', key)
