-- KEYS     the beginning of all keys
-- ARGV     job, owner, millisecond that it is, millisecond at which the lease ends
-- returns  whether the job is the owner's until then
local held = redis.call('HGET', KEYS[1] .. 'leases', ARGV[1])
if held then
  local until_ms, owner = held:match('^(%d+) (.*)$')
  if until_ms and owner ~= ARGV[2] and tonumber(until_ms) > tonumber(ARGV[3]) then
    return 0
  end
end
redis.call('HSET', KEYS[1] .. 'leases', ARGV[1], ARGV[4] .. ' ' .. ARGV[2])
return 1
