-- Sets the end of what is there.
-- ARGV     ..., microseconds to live from now on, what `all_of` has of it
-- returns  1; 0 when it is not there
local ttl = tonumber(ARGV[3])
if not redis.call('ZSCORE', ends, key) or is_over(key) or redis.call('EXISTS', bodies .. key) == 0 then
  return 0
end
redis.call('ZADD', ends, string.format('%.0f', now + ttl), key)
redis.call('PEXPIRE', bodies .. key, math.ceil(ttl / 1000))
redis.call('HSET', about, key, ARGV[4])
return 1
