-- Adds figures to rows, once for each number. Days that are new are noted, so that they can be found and dropped.
-- KEYS  the number, days, then the hash of each day
-- ARGV  seconds that the number is remembered, then for each figure: index of its day's hash in KEYS, field, value
if not redis.call('SET', KEYS[1], 1, 'NX', 'EX', ARGV[1]) then
  return 0
end
for index = 3, #KEYS do
  redis.call('SADD', KEYS[2], string.sub(KEYS[index], -10))
end
for index = 2, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[tonumber(ARGV[index])], ARGV[index + 1], ARGV[index + 2])
end
return 1
