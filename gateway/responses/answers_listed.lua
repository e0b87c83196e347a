-- In front of the scripts that change what is listed.
-- KEYS  used, ends, sizes, about, the beginning of the keys of answers
local used, ends, sizes, about, prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local function unlist(one)
  local counted = redis.call('HGET', sizes, one)
  redis.call('ZREM', used, one)
  redis.call('ZREM', ends, one)
  redis.call('HDEL', about, one)
  if counted then
    redis.call('HDEL', sizes, one)
    redis.call('HINCRBY', sizes, '', 0 - tonumber(counted))
  end
end
