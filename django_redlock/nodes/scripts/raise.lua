-- Raise the fencing token of a lock that this node granted.
-- KEYS: as in acquire.lua. ARGV: nonce, token, fence keep ms ('' is for ever)
local nonce, number, keep = ARGV[1], ARGV[2], ARGV[3]
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local high, ours = '0', true
for i = 3, #KEYS, 2 do
  local current = redis.call('GET', KEYS[i])
  local fence = redis.call('GET', KEYS[i + 1]) or '0'
  if tonumber(fence) > tonumber(high) then high = fence end
  if not current or string.sub(current, 1, 32) ~= nonce then ours = false end
end
if not ours then return {'REFUSED', high, stamp, '0', ''} end
if tonumber(number) <= tonumber(high) then return {'GRANTED', high, stamp, '0', ''} end
for i = 4, #KEYS, 2 do
  if keep == '' then redis.call('SET', KEYS[i], number) else redis.call('SET', KEYS[i], number, 'PX', keep) end
end
return {'ACCEPTED', number, stamp, '0', ''}
