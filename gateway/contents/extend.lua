-- Sets the end of one cached content.
--
-- KEYS[1]  hash of the tenant: name -> JSON of everything but the body
-- KEYS[2]  body of this content
-- ARGV     now_ms, name, expires_ms
-- returns  its JSON from now on; nil when it is not there
local now, name, expires = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local entry = redis.call('HGET', KEYS[1], name)
if not entry or redis.call('EXISTS', KEYS[2]) == 0 then
  return nil
end
local content = cjson.decode(entry)
if content.expires_ms <= now then
  return nil
end
content.expires_ms = expires
content.updated_ms = now
entry = cjson.encode(content)
redis.call('HSET', KEYS[1], name, entry)
redis.call('PEXPIREAT', KEYS[2], ARGV[3])
local time = redis.call('TIME')
if time[1] * 1000 + redis.call('PTTL', KEYS[1]) < expires then
  redis.call('PEXPIREAT', KEYS[1], ARGV[3])
end
return entry
