-- Notes that answers were removed, as the last removal. The first ones go when there are too many.
-- KEYS  as in removals_read.lua
-- ARGV  which answers, removals at most, name of a log that begins with this one
redis.call('HSETNX', KEYS[1], 'log', ARGV[3])
redis.call('LPUSH', KEYS[2], ARGV[1])
redis.call('LTRIM', KEYS[2], 0, ARGV[2] - 1)
return redis.call('HINCRBY', KEYS[1], 'number', 1)
