-- How many leading blocks of one prompt does each engine hold?
--
-- KEYS     blocks_key of each candidate incarnation (engine/protocol/values.py): a hash with the block digests as fields
-- ARGV[1]  the prompt's block digests, 16 bytes each, one after the other
-- returns  one integer for each key: leading digests that are fields of it; -1 when there is no such key
--
-- Presence is prefix-closed, so an engine takes a bisection: log2(blocks) HEXISTS. Most engines of a fleet hold as much
-- as others, a shared system prompt or nothing: what two in a row held is tried first, which takes two. Reads only.
local digests = ARGV[1]
local blocks = math.floor(#digests / 16)

local function holds(key, block) -- from 1; a key of another type holds no block
  return redis.pcall('HEXISTS', key, string.sub(digests, block * 16 - 15, block * 16)) == 1
end

local found, usual, last = {}, 0, 0
for index, key in ipairs(KEYS) do
  local low, high = 0, blocks -- blocks up to `low` are held, those behind `high` are not
  if usual > 0 and not holds(key, usual) then
    high = usual - 1
  elseif usual < blocks then
    if holds(key, usual + 1) then low = usual + 1 else low, high = usual, usual end
  else
    low = blocks
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if holds(key, middle + 1) then low = middle + 1 else high = middle end
  end
  if low == last then usual = low end
  last = low
  if low == 0 and redis.call('EXISTS', key) == 0 then
    low = -1
  end
  found[index] = low
end
return found
