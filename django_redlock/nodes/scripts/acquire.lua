-- Take a lock on this node, or say who has it. All names or none.
-- KEYS: index, cancel marker, then holder and fence of each name
-- ARGV: nonce, value, ttl ms, proposed token, fence keep ms ('' is for ever), ahead µs, nonce to adopt, prefix
local index, marker = KEYS[1], KEYS[2]
local nonce, value, ttl, number, keep = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local ahead, adopt, prefix = tonumber(ARGV[6]), ARGV[7], ARGV[8]
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)

-- Read every key before writing any: a key of another type must not leave half a grant behind.
redis.call('ZCARD', index)
local cancelled = redis.call('EXISTS', marker) == 1
local high, busy, left, endless = '0', nil, 0, {}
for i = 3, #KEYS, 2 do
  local current = redis.call('GET', KEYS[i])
  local fence = redis.call('GET', KEYS[i + 1]) or '0'
  if tonumber(fence) > tonumber(high) then high = fence end
  if current then
    local owner = string.sub(current, 1, 32)
    if owner ~= nonce and (adopt == '' or owner ~= adopt) then
      local pttl = redis.call('PTTL', KEYS[i])
      if pttl == -1 then endless[#endless + 1] = string.sub(KEYS[i], #prefix + 1, -3) end
      if busy == nil or pttl == -1 or (left ~= -1 and pttl > left) then left = pttl end
      busy = busy or string.sub(current, 33)
    end
  end
end
if cancelled then return {'CANCELLED', high, stamp, '0', ''} end
-- A key without expiry was written by something else and blocks the name for ever: let people find it.
for _, slug in ipairs(endless) do
  redis.call('ZADD', index, '+inf', slug)
  if redis.call('PTTL', index) < ttl then redis.call('PEXPIRE', index, ttl) end
end
if busy then return {'BUSY', high, stamp, tostring(left), busy} end

for i = 3, #KEYS, 2 do
  redis.call('SET', KEYS[i], value, 'PX', ttl)
  redis.call('ZADD', index, now_ms + ttl, string.sub(KEYS[i], #prefix + 1, -3))
end
if redis.call('PTTL', index) < ttl then redis.call('PEXPIRE', index, ttl) end
-- Names whose holder died leave the index here, a few at a time; a key without expiry stays listed.
for _, slug in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now_ms, 'LIMIT', 0, 8)) do
  local pttl = redis.call('PTTL', prefix .. slug .. ':h')
  if pttl == -2 then
    redis.call('ZREM', index, slug)
  elseif pttl == -1 then
    redis.call('ZADD', index, '+inf', slug)
  else
    redis.call('ZADD', index, now_ms + pttl, slug)
  end
end
-- Strictly greater, and not absurdly in the future. Compare as numbers (exact below 2^53), store the text:
-- Lua's own text of such a number loses digits.
if tonumber(number) > tonumber(high) and tonumber(number) <= tonumber(stamp) + ahead then
  for i = 4, #KEYS, 2 do
    if keep == '' then redis.call('SET', KEYS[i], number) else redis.call('SET', KEYS[i], number, 'PX', keep) end
  end
  return {'ACCEPTED', number, stamp, '0', ''}
end
return {'GRANTED', high, stamp, '0', ''}
