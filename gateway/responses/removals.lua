-- The next epoch of removals, and the removal that it begins with.
-- KEYS     hash: epoch, last
-- ARGV     epoch at which counting begins where there is none, JSON of the removal or empty for none
-- returns  the epoch
redis.call('HSETNX', KEYS[1], 'epoch', ARGV[1])
if ARGV[2] == '' then
  return redis.call('HGET', KEYS[1], 'epoch')
end
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'last', ARGV[2])
return epoch
