-- The next lines that ask one model: those of the tenant whose turn it is, from behind the last one that was claimed.
-- KEYS     the beginning of all keys
-- ARGV     owner, model, lines at most, millisecond at which their lease ends, tokens of a turn
-- returns  lane, place, and tries in vain and dead engines (or nothing) of each
local prefix, owner, model, most = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local turns, claimed = prefix .. 'turns:' .. model, {}

local function next_tenant()
  local first = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')
  local last = redis.call('HGET', prefix .. 'last', model)
  local turn = last and redis.call('ZSCORE', turns, last)
  if turn and tonumber(turn) - tonumber(first[2]) < tonumber(ARGV[5]) then
    return last, turn
  end
  return first[1], first[2]
end

local function following(waiting, cursor, count)
  local places = cursor and redis.call('ZRANGEBYLEX', waiting, '(' .. cursor, '+', 'LIMIT', 0, count) or {}
  if #places == 0 then
    places = redis.call('ZRANGEBYLEX', waiting, '-', '+', 'LIMIT', 0, count)
  end
  return places
end

while #claimed < 3 * most do
  if redis.call('ZCARD', turns) == 0 then
    redis.call('SREM', prefix .. 'models', model)
    redis.call('HDEL', prefix .. 'clock', model)
    redis.call('HDEL', prefix .. 'last', model)
    break
  end
  local tenant, turn = next_tenant()
  local lane = tenant .. ':' .. model
  local waiting, cost = prefix .. 'waiting:' .. lane, 0
  local places = following(waiting, redis.call('HGET', prefix .. 'cursors', lane), most - #claimed / 3)
  if #places == 0 then
    redis.call('ZREM', turns, tenant)
    redis.call('HDEL', prefix .. 'cursors', lane)
  else
    for _, place in ipairs(places) do
      redis.call('ZREM', waiting, place)
      if #place >= 24 then -- else it is no place, and was none of a line
        local ref = place:sub(-24, -5)
        redis.call('ZADD', prefix .. 'claims', ARGV[4], ref)
        redis.call('HSET', prefix .. 'claimed', ref, struct.pack('>I2c0I2c0', #owner, owner, #lane, lane) .. place)
        cost = cost + 1 + struct.unpack('>I4', place, #place - 3)
        for _, one in ipairs({lane, place, redis.call('HGET', prefix .. 'tries', ref) or ''}) do
          claimed[#claimed + 1] = one
        end
      end
    end
    redis.call('HSET', prefix .. 'cursors', lane, places[#places])
    redis.call('HSET', prefix .. 'clock', model, turn)
    redis.call('HSET', prefix .. 'last', model, tenant)
    redis.call('ZINCRBY', turns, cost, tenant)
  end
end
return claimed
