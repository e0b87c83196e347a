-- Removes an answer; without an id those that were used longest ago, until the rest has so many bytes.
-- KEYS  as in answers_listed.lua, which is in front of this
-- ARGV  id or empty, bytes at most
-- Returns the bytes of all answers then, and how many were there and are not any more.
local removed = 0

local function remove(one)
  unlist(one)
  removed = removed + redis.call('DEL', prefix .. one)
end

if ARGV[1] ~= '' then
  remove(ARGV[1])
else
  while tonumber(redis.call('HGET', sizes, '') or 0) > tonumber(ARGV[2]) do
    local first = redis.call('ZRANGE', used, 0, 0)[1]
    if not first then
      redis.call('DEL', sizes)
      break
    end
    remove(first)
  end
end
return { tonumber(redis.call('HGET', sizes, '') or 0), removed }
