-- Ends one cached content, and leaves a mark for gateways that have a copy, for as long as a copy may be used.
--
-- KEYS[1]  hash of the tenant: name -> JSON of everything but the body
-- KEYS[2]  body of this content
-- KEYS[3]  mark that it was deleted
-- ARGV     now_ms, name, end of the mark in ms
-- returns  1 when it was there, else 0
local entry = redis.call('HGET', KEYS[1], ARGV[2])
local was_there = entry and cjson.decode(entry).expires_ms > tonumber(ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[3], '', 'PXAT', ARGV[3])
return was_there and 1 or 0
