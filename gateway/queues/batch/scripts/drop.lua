-- Lines of a job that do not run are done without a result: those that are not queued, and those that wait in a lane.
-- KEYS     the beginning of all keys
-- ARGV     job, the same in bytes, its lines, kind of their end, lane, place after which to look, or nothing, places to
--          look at
-- returns  the last place that was looked at; nothing at the end of the lane
local prefix, counts, kind = KEYS[1], KEYS[1] .. 'counts:' .. ARGV[1], ARGV[4]
local waiting, after = prefix .. 'waiting:' .. ARGV[5], ARGV[6] == '' and '-' or '(' .. ARGV[6]
redis.call('DEL', prefix .. 'staged:' .. ARGV[1])
local dropped = tonumber(ARGV[3]) - (tonumber(redis.call('HGET', counts, 'queued') or 0) or 0)
local places = redis.call('ZRANGEBYLEX', waiting, after, '+', 'LIMIT', 0, ARGV[7])
for _, place in ipairs(places) do
  if place:sub(-24, -9) == ARGV[2] then
    redis.call('ZREM', waiting, place)
    redis.call('HDEL', prefix .. 'tries', place:sub(-24, -5))
    dropped = dropped + 1
  end
end
redis.call('HSET', counts, 'planned', ARGV[3], 'queued', ARGV[3])
redis.call('HINCRBY', counts, kind, dropped)
return #places == tonumber(ARGV[7]) and places[#places] or ''
