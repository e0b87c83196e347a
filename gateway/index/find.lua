-- How many leading blocks of one prompt does each engine hold?
--
-- KEYS     blocks_key of each candidate incarnation (engine/protocol/values.py): a hash with the block digests as fields
-- ARGV[1]  the prompt's block digests, 16 bytes each, one after the other
-- returns  one integer for each key: leading digests that are fields of it; -1 when there is no such key
--
-- Presence is prefix-closed, so each engine takes a bisection: log2(blocks) HEXISTS. Reads only.
local digests = ARGV[1]
local blocks = math.floor(#digests / 16)
local found = {}
for index, key in ipairs(KEYS) do
  local low, high = 0, blocks -- blocks before `low` are held, block `high` is not
  while low < high do
    local middle = math.floor((low + high) / 2)
    local digest = string.sub(digests, middle * 16 + 1, middle * 16 + 16)
    if redis.pcall('HEXISTS', key, digest) == 1 then -- a key of another type holds no block
      low = middle + 1
    else
      high = middle
    end
  end
  if low == 0 and redis.call('EXISTS', key) == 0 then
    low = -1
  end
  found[index] = low
end
return found
