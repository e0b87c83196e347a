-- Keeps a body in place of what has its id. What is over its time goes, then what was kept first, until it fits.
-- KEYS     order, sizes, the beginning of the keys of bodies
-- ARGV     id, body, milliseconds to live, bodies at most, bytes at most; the body alone fits. May be followed by the
--          SHA-1 of what has to be kept under the id until now
-- returns  1; 0, and nothing was changed, if something else is kept, or nothing
local order, sizes, prefix = KEYS[1], KEYS[2], KEYS[3]
local id, body = ARGV[1], ARGV[2]
local ttl_ms, max_bodies, max_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

if ARGV[6] then
  local before = redis.call('GET', prefix .. id)
  if not before or redis.sha1hex(before) ~= ARGV[6] then
    return 0
  end
end

local function unlist(one)
  local size = redis.call('HGET', sizes, one)
  redis.call('ZREM', order, one)
  if size then
    redis.call('HDEL', sizes, one)
    redis.call('HINCRBY', sizes, '', 0 - tonumber(size))
  end
end

-- The first write, because a Redis that is full refuses a script only at its first write.
redis.call('SET', prefix .. id, body, 'PX', ttl_ms)
unlist(id)
for _, one in ipairs(redis.call('ZRANGEBYSCORE', order, '-inf', now_ms)) do
  unlist(one)
end
if redis.call('ZCARD', order) == 0 then
  redis.call('DEL', sizes)
end
while redis.call('ZCARD', order) >= max_bodies or tonumber(redis.call('HGET', sizes, '') or 0) + #body > max_bytes do
  local first = redis.call('ZRANGE', order, 0, 0)[1]
  if not first then
    break
  end
  unlist(first)
  redis.call('DEL', prefix .. first)
end
redis.call('ZADD', order, now_ms + ttl_ms, id)
redis.call('HSET', sizes, id, #body)
redis.call('HINCRBY', sizes, '', #body)
return 1
