-- Keeps an answer in place of what has its id. What is over its time goes, then what was used longest ago, until it fits.
-- KEYS  as in answers_listed.lua, which is in front of this
-- ARGV  id, answer, milliseconds to live, bytes that it counts, bytes at most, what is told of it; it alone fits
-- Returns the bytes of all answers then, and how many were evicted.
local id, ttl_ms, size, max_bytes = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- The first write, because a Redis that is full refuses a script only at its first write.
redis.call('SET', prefix .. id, ARGV[2], 'PX', ttl_ms)
unlist(id)
for _, one in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now_ms)) do
  unlist(one)
end
local evicted = 0
while tonumber(redis.call('HGET', sizes, '') or 0) + size > max_bytes do
  local first = redis.call('ZRANGE', used, 0, 0)[1]
  if not first then
    redis.call('DEL', sizes)
    break
  end
  unlist(first)
  redis.call('DEL', prefix .. first)
  evicted = evicted + 1
end
redis.call('ZADD', used, now_ms, id)
redis.call('ZADD', ends, now_ms + ttl_ms, id)
redis.call('HSET', about, id, ARGV[6])
redis.call('HSET', sizes, id, size)
return { redis.call('HINCRBY', sizes, '', size), evicted }
