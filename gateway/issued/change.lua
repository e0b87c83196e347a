-- Changes what admins have made, if it is still the version that the change was made for: all of it or nothing.
-- KEYS     the hash
-- ARGV     the version that there has to be (empty for none), the new one, then pairs of a field and its value; an
--          empty value removes the field
-- returns  1, or 0 for another version
if (redis.call('HGET', KEYS[1], 'version') or '') ~= ARGV[1] then
  return 0
end
for index = 3, #ARGV, 2 do
  if ARGV[index + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[index])
  else
    redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 1])
  end
end
redis.call('HSET', KEYS[1], 'version', ARGV[2])
return 1
