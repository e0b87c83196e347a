-- Moves the ends of leases on that have not ended.
-- ARGV  now, microseconds of a lease; then ids
local lease = tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
for i = 3, #ARGV do
  redis.call('ZADD', KEYS[2], 'XX', string.format('%.0f', now + lease), ARGV[i])
end
redis.call('PEXPIRE', KEYS[2], math.ceil(lease / 1000) + 1000)
return 1
