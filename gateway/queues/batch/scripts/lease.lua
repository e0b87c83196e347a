-- KEYS     the beginning of all keys
-- ARGV     job, owner, current millisecond, millisecond at which the lease ends; 0 releases it
-- returns  whether the job is leased to the owner until then
local held = redis.call('HGET', KEYS[1] .. 'leases', ARGV[1])
if held then
  local until_ms, owner = held:match('^(%d+) (.*)$')
  if until_ms and owner ~= ARGV[2] and tonumber(until_ms) > tonumber(ARGV[3]) then
    return 0
  end
end
if ARGV[4] == '0' then
  redis.call('HDEL', KEYS[1] .. 'leases', ARGV[1])
else
  redis.call('HSET', KEYS[1] .. 'leases', ARGV[1], ARGV[4] .. ' ' .. ARGV[2])
end
return 1
