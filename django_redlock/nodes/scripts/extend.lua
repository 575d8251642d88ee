-- Extend a lock; give it back to a node that lost it, but never past a newer token or our own release.
-- KEYS: as in acquire.lua. ARGV: nonce, value, ttl ms, token, fence keep ms ('' is for ever), prefix
local index, marker = KEYS[1], KEYS[2]
local nonce, value, ttl, token, keep = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local prefix = ARGV[6]
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
redis.call('ZCARD', index)
local refused = redis.call('EXISTS', marker) == 1
local high, missing = '0', {}
for i = 3, #KEYS, 2 do
  local current = redis.call('GET', KEYS[i])
  local fence = redis.call('GET', KEYS[i + 1]) or '0'
  if tonumber(fence) > tonumber(high) then high = fence end
  if not current then
    missing[i] = true
    if tonumber(fence) > tonumber(token) then refused = true end
  elseif string.sub(current, 1, 32) ~= nonce then
    refused = true
  end
end
if refused then return {'REFUSED', high, stamp, '0', ''} end
for i = 3, #KEYS, 2 do
  if missing[i] then
    redis.call('SET', KEYS[i], value, 'PX', ttl)
    if keep == '' then redis.call('SET', KEYS[i + 1], token) else redis.call('SET', KEYS[i + 1], token, 'PX', keep) end
  else
    redis.call('PEXPIRE', KEYS[i], ttl)
    if keep ~= '' then redis.call('PEXPIRE', KEYS[i + 1], keep) end
  end
  redis.call('ZADD', index, now_ms + ttl, string.sub(KEYS[i], #prefix + 1, -3))
end
if redis.call('PTTL', index) < ttl then redis.call('PEXPIRE', index, ttl) end
return {'HELD', high, stamp, '0', ''}
