-- Which gateway follows an event stream.
-- KEYS[1]  the lease: a hash with `owner`, `fence`, `state`, that lives as long as its owner renews it
-- ARGV     owner, milliseconds that the lease lives from now on (0 releases it), what the owner says of the stream
-- returns  the fence and the state: {fence, ''} if the owner has it, {'', state of the other one} if another one does.
--          A fence is a number, larger for each lease: Redis's own time, which survives a Redis that begins empty
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then
  return {'', redis.call('HGET', KEYS[1], 'state') or ''}
end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return {'', ''}
end
local fence = redis.call('HGET', KEYS[1], 'fence')
if not fence then
  local now = redis.call('TIME')
  fence = now[1] .. string.format('%06d', now[2])
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'fence', fence, 'state', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {fence, ''}
