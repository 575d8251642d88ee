-- Raise the fencing token of a lock that this node granted.
-- KEYS: the holders and the fences of all names; if shared, the holders of each name
-- ARGV: secret, fencing token, fence keep ms ('' is for ever), shared ('1' or '')
local secret, number, keep, shared = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local SHARED = 'shared--------------------------'
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local names = #KEYS / (shared and 3 or 2)
local high, ours = '0', true
for i = 1, names do
  local current = redis.call('GET', KEYS[i])
  local fence = redis.call('GET', KEYS[names + i]) or '0'
  if tonumber(fence) > tonumber(high) then high = fence end
  if not current or string.sub(current, 1, 32) ~= (shared and SHARED or secret) then ours = false end
  if shared and not redis.call('ZSCORE', KEYS[2 * names + i], secret) then ours = false end
end
if not ours then return 'REFUSED ' .. high .. ' ' .. stamp .. ' 0 -1 ' end
if tonumber(number) <= tonumber(high) then return 'GRANTED ' .. high .. ' ' .. stamp .. ' 0 -1 ' end
for i = names + 1, 2 * names do
  if keep == '' then redis.call('SET', KEYS[i], number) else redis.call('SET', KEYS[i], number, 'PX', keep) end
end
return 'ACCEPTED ' .. number .. ' ' .. stamp .. ' 0 -1 '
