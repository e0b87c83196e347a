-- Lines of a job that wait in a lane get a result without having run.
-- KEYS     the beginning of all keys
-- ARGV     job, the same in bytes, lane, place after which to look, or nothing, kind of the result, places to look at
-- returns  the last place that was looked at; nothing at the end of the lane
local prefix, job, waiting = KEYS[1], ARGV[1], KEYS[1] .. 'waiting:' .. ARGV[3]
local after = ARGV[4] == '' and '-' or '(' .. ARGV[4]
local places = redis.call('ZRANGEBYLEX', waiting, after, '+', 'LIMIT', 0, ARGV[6])
for _, place in ipairs(places) do
  if place:sub(-24, -9) == ARGV[2] then
    redis.call('ZREM', waiting, place)
    redis.call('HDEL', prefix .. 'attempts', place:sub(-24, -5))
    redis.call('HDEL', prefix .. 'deaths', place:sub(-24, -5))
    redis.call('HSET', prefix .. 'results:' .. job, struct.unpack('>I4', place, #place - 7), ARGV[5])
    redis.call('HINCRBY', prefix .. 'counts:' .. job, ARGV[5], 1)
  end
end
return #places == tonumber(ARGV[6]) and places[#places] or ''
