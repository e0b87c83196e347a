-- KEYS     the beginning of all keys
-- ARGV     owner, millisecond at which the leases end from now on, lines
-- returns  the lines that are the owner's
local ours = {}
for index = 3, #ARGV do
  local claim = redis.call('HGET', KEYS[1] .. 'claimed', ARGV[index])
  local is_ours, owner = pcall(struct.unpack, '>I2c0', claim or '')
  if is_ours and owner == ARGV[1] then
    redis.call('ZADD', KEYS[1] .. 'claims', ARGV[2], ARGV[index])
    ours[#ours + 1] = ARGV[index]
  end
end
return ours
