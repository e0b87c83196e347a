-- In front of take.lua and give_back.lua. `strange` counts buckets that could not be read and count as full.
local strange = 0
local function full_at(found) -- 0 for what is no time that a gateway wrote
  local at = tonumber(found or 0)
  if at and at >= 0 and at < 9007199254740992 then
    return at
  end
  strange = strange + 1
  return 0
end
