-- KEYS     the beginning of all keys
-- ARGV     job, owner
local held = redis.call('HGET', KEYS[1] .. 'leases', ARGV[1])
if held and held:match('^%d+ (.*)$') == ARGV[2] then
  redis.call('HDEL', KEYS[1] .. 'leases', ARGV[1])
end
