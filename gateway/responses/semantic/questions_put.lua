-- Keeps a question, or that it is gone, as the last change. What changed first goes until it fits.
-- KEYS  changes, questions, sequence, bytes
-- ARGV  id, bytes of the question (empty: gone), questions at most, bytes at most, seconds until all of them end
-- Returns the number of the change.
local changes, questions, sequence, total = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, body = ARGV[1], ARGV[2]

local number = redis.call('INCR', sequence)
local size = redis.call('HSTRLEN', questions, id)
redis.call('HSET', questions, id, body)
redis.call('ZADD', changes, number, id)
local bytes = redis.call('INCRBY', total, #body - size)
while redis.call('ZCARD', changes) > tonumber(ARGV[3]) or bytes > tonumber(ARGV[4]) do
  local first = redis.call('ZRANGE', changes, 0, 0)[1]
  if not first then
    break
  end
  bytes = redis.call('DECRBY', total, redis.call('HSTRLEN', questions, first))
  redis.call('ZREM', changes, first)
  redis.call('HDEL', questions, first)
end
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, ARGV[5])
end
return number
