-- There is nothing left to do for a job, which is kept until it is over its time.
-- KEYS     the beginning of all keys
-- ARGV     job, millisecond from which on it may be forgotten
local key, quota = KEYS[1] .. 'job:' .. ARGV[1], KEYS[1] .. 'quota'
if redis.call('SREM', KEYS[1] .. 'open', ARGV[1]) == 1 then
  local tenant = redis.call('HGET', key, 'tenant')
  redis.call('HINCRBY', quota, 'jobs:' .. tenant, -1)
  redis.call('HINCRBY', quota, 'lines:' .. tenant, 0 - tonumber(redis.call('HGET', key, 'lines')))
  redis.call('ZADD', KEYS[1] .. 'ended', ARGV[2], ARGV[1])
end
