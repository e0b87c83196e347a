-- Plans of the next lines of a job, if they are the next.
-- KEYS     the beginning of all keys
-- ARGV     job, number of the first line, and for each line: length of the model's name (>I2), name, tokens (>I4), path
-- returns  how many lines are planned now
local counts = KEYS[1] .. 'counts:' .. ARGV[1]
if tonumber(redis.call('HGET', counts, 'planned') or 0) == tonumber(ARGV[2]) then
  redis.call('RPUSH', KEYS[1] .. 'staged:' .. ARGV[1], unpack(ARGV, 3))
  return redis.call('HINCRBY', counts, 'planned', #ARGV - 2)
end
return tonumber(redis.call('HGET', counts, 'planned') or 0)
