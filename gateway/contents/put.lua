-- Keeps one cached content of a tenant, within its limits.
--
-- KEYS[1]  hash of the tenant: name -> JSON of everything but the body
-- KEYS[2]  body of this content
-- KEYS[3]  mark of a content of this name that was deleted
-- ARGV     now_ms, name, JSON, body, expires_ms, num_bytes, most contents, most bytes, whether it comes anew
-- returns  "kept"; "many" or "large" past a limit; "deleted" when it does not come anew and was deleted meanwhile
--
-- What has ended is dropped on the way. The hash ends with the last of its contents.
local now, name, expires = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[5])
if ARGV[9] == '0' and redis.call('EXISTS', KEYS[3]) == 1 then
  return 'deleted'
end
local count, bytes, last = 0, 0, expires
local entries = redis.call('HGETALL', KEYS[1])
for index = 1, #entries, 2 do
  local content = cjson.decode(entries[index + 1])
  if content.expires_ms <= now then
    redis.call('HDEL', KEYS[1], entries[index])
  elseif entries[index] ~= name then
    count = count + 1
    bytes = bytes + content.num_bytes
    last = math.max(last, content.expires_ms)
  end
end
if count >= tonumber(ARGV[7]) then
  return 'many'
end
if bytes + tonumber(ARGV[6]) > tonumber(ARGV[8]) then
  return 'large'
end
redis.call('HSET', KEYS[1], name, ARGV[3])
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', last))
redis.call('SET', KEYS[2], ARGV[4], 'PXAT', ARGV[5])
redis.call('DEL', KEYS[3])
return 'kept'
