-- Moves the ends of leases on that have not ended.
-- KEYS  flights, as in take.lua
-- ARGV  now as in take.lua, microseconds of a lease; then ids
local lease = tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
for i = 3, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', now + lease), ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], math.ceil(lease / 1000) + 1000)
return 1
