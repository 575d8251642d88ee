-- Give a lock up, if it is ours.
-- KEYS: as in acquire.lua. ARGV: nonce, bury ms, prefix
local index, marker = KEYS[1], KEYS[2]
local nonce, bury, prefix = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
redis.call('ZCARD', index)
local mine, taken = {}, false
for i = 3, #KEYS, 2 do
  local current = redis.call('GET', KEYS[i])
  if current and string.sub(current, 1, 32) == nonce then
    mine[#mine + 1] = KEYS[i]
  elseif current then
    taken = true
  end
end
for _, key in ipairs(mine) do
  redis.call('DEL', key)
  redis.call('ZREM', index, string.sub(key, #prefix + 1, -3))
end
-- A request of ours may still be on its way, and must find this marker.
if bury > 0 then redis.call('SET', marker, '1', 'PX', bury) end
if #mine > 0 then return {'RELEASED', '0', stamp, '0', ''} end
return {taken and 'BUSY' or 'GONE', '0', stamp, '0', ''}
