-- Adds figures to rows, once for each number: all of them, or none and an error. Days that are new are noted, so that
-- they can be found and dropped. What can fail is looked at before the first figure is written. A sum that 64 bits
-- cannot hold stays at the largest number, and a field that holds no number begins again: neither keeps other figures
-- from being written.
-- KEYS     the latest number of the writer, days, then the hash of each day
-- ARGV     seconds that it is remembered, the number, then for each figure: index of its day's hash in KEYS, field, value
-- returns  how many figures were capped, or began again
local latest = redis.call('GET', KEYS[1])
if latest and tonumber(latest) >= tonumber(ARGV[2]) then
  return 0
end
for index = 2, #KEYS do
  local wanted, found = index == 2 and 'set' or 'hash', redis.call('TYPE', KEYS[index]).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGTYPE ' .. KEYS[index] .. ' is a ' .. found .. ', not a ' .. wanted)
  end
end
for index = 3, #KEYS do
  redis.call('SADD', KEYS[2], string.sub(KEYS[index], -10))
end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[1])
local capped = 0
for index = 3, #ARGV, 3 do
  local day, field, value = KEYS[tonumber(ARGV[index])], ARGV[index + 1], ARGV[index + 2]
  local added = redis.pcall('HINCRBY', day, field, value)
  if type(added) == 'table' then
    if string.find(added.err, 'overflow', 1, true) then
      local sign = string.sub(value, 1, 1) == '-' and '-' or ''
      redis.call('HSET', day, field, sign .. '9223372036854775807')
    elseif string.find(added.err, 'not an integer', 1, true) then
      redis.call('HSET', day, field, value)
    else -- what is not allowed: it fails at the first figure
      redis.call('SET', KEYS[1], latest or 0, 'EX', ARGV[1])
      return added
    end
    capped = capped + 1
  end
end
return capped
