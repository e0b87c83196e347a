-- Returns an answer, which counts as a use of it; nil without one.
-- KEYS  as in answers_listed.lua
-- ARGV  id
local answer = redis.call('GET', KEYS[5] .. ARGV[1])
if answer then
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[1], 'XX', time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
end
return answer
