-- Removes an entry; without a key those that are evicted first, until the rest has so many bytes.
-- ARGV     ..., bytes at most
-- returns  bytes of the owner's entries then, and how many were there
local removed
if key == '' then
  removed = evict(math.huge, tonumber(ARGV[3]))
else
  local over = is_over(key)
  removed = drop(key)
  if over then
    removed = 0
  end
end
return { size_of(''), removed }
