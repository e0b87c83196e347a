-- Lines that were never queued get a result without having run, and none can be queued any more.
-- KEYS     the beginning of all keys
-- ARGV     job, its lines, kind of the result, lines at most
-- returns  how many are left
local results, counts = KEYS[1] .. 'results:' .. ARGV[1], KEYS[1] .. 'counts:' .. ARGV[1]
local total, queued = tonumber(ARGV[2]), tonumber(redis.call('HGET', counts, 'queued') or 0) or 0
local to = math.min(total, queued + tonumber(ARGV[4]))
redis.call('HSET', counts, 'planned', total)
redis.call('DEL', KEYS[1] .. 'staged:' .. ARGV[1])
for line = queued, to - 1 do
  redis.call('HSET', results, line, ARGV[3])
end
if to > queued then
  redis.call('HSET', counts, 'queued', to)
  redis.call('HINCRBY', counts, ARGV[3], to - queued)
end
return total - to
