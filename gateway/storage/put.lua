-- Stores a body in place of what has its key. What is over goes first; past the quota others are evicted.
-- ARGV     ..., body, microseconds to live, bytes that count, bytes and entries at most, what `all_of` has of it, SHA-1 of
--          the body that is expected or empty, 1 to refuse instead of evicting; it alone fits
-- returns  stored, entries, bytes or changed (byte_store.Put); bytes of the owner; entries that were evicted
local body, ttl, size = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local max_bytes, max_entries = tonumber(ARGV[6]), tonumber(ARGV[7])

if ARGV[9] ~= '' then
  local found = not is_over(key) and redis.call('GET', bodies .. key)
  if not found or redis.sha1hex(found) ~= ARGV[9] then
    return { 'changed', 0, 0 }
  end
end
local over = redis.call('ZRANGEBYSCORE', ends, '-inf', now)
if ARGV[10] == '1' then
  local entries, bytes = redis.call('ZCARD', ends) - #over, size_of('')
  for _, one in ipairs(over) do
    bytes = bytes - size_of(one)
  end
  if redis.call('ZSCORE', ends, key) and not is_over(key) then
    entries, bytes = entries - 1, bytes - size_of(key)
  end
  if entries >= max_entries then
    return { 'entries', 0, 0 }
  elseif bytes + size > max_bytes then
    return { 'bytes', 0, 0 }
  end
end

-- The first write, because a Redis that is full refuses a script only at its first write.
redis.call('SET', bodies .. key, body, 'PX', math.ceil(ttl / 1000))
for _, one in ipairs(over) do
  if one ~= key then
    drop(one)
  end
end
if redis.call('HEXISTS', sizes, key) == 1 then
  redis.call('HINCRBY', sizes, '', 0 - size_of(key))
end
redis.call('ZREM', used, key)
if redis.call('ZCARD', used) == 0 then
  redis.call('DEL', sizes)
end
local evicted = evict(max_entries - 1, max_bytes - size)
redis.call('ZADD', used, now, key)
redis.call('ZADD', ends, string.format('%.0f', now + ttl), key)
redis.call('HSET', about, key, ARGV[8])
redis.call('HSET', sizes, key, size)
return { 'stored', redis.call('HINCRBY', sizes, '', size), evicted }
