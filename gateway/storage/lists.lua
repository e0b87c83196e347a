-- In front of the other scripts of redis_bytes.py, which has the layout.
-- KEYS  used, ends, sizes, about, the beginning of the keys of bodies
-- ARGV  key, now in microseconds; then what each script has of its own
local used, ends, sizes, about, bodies = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local key, now = ARGV[1], tonumber(ARGV[2])

local function size_of(one) -- '': the sum
  return tonumber(redis.call('HGET', sizes, one) or 0) or 0
end

local function is_over(one)
  local at = redis.call('ZSCORE', ends, one)
  return at and tonumber(at) <= now
end

-- Returns 1 if its body was there, else 0.
local function drop(one)
  local size = size_of(one)
  redis.call('ZREM', used, one)
  redis.call('ZREM', ends, one)
  redis.call('HDEL', about, one)
  if redis.call('HDEL', sizes, one) == 1 then
    redis.call('HINCRBY', sizes, '', 0 - size) -- of 0 it would else be -0, which Redis refuses
  end
  return redis.call('DEL', bodies .. one)
end

-- Drops what is evicted first while there are more entries or bytes. Returns how many were there.
local function evict(max_entries, max_bytes)
  local dropped = 0
  while redis.call('ZCARD', used) > max_entries or size_of('') > max_bytes do
    local first = redis.call('ZRANGE', used, 0, 0)[1]
    if not first then
      redis.call('DEL', sizes)
      break
    end
    dropped = dropped + drop(first)
  end
  return dropped
end
