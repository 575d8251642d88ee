-- Report locks: the names given, or one page of the index in the order of expiry.
-- KEYS: index. ARGV: prefix, offset, count, then slugs
local prefix, offset, size = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local slugs = {}
for i = 4, #ARGV do slugs[#slugs + 1] = ARGV[i] end
if size > 0 then slugs = redis.call('ZRANGE', KEYS[1], offset, offset + size - 1) end
local reply = {'LISTED', '0', stamp, tostring(redis.call('ZCARD', KEYS[1])), ''}
for _, slug in ipairs(slugs) do
  local holder = prefix .. slug .. ':h'
  local kind = redis.call('TYPE', holder)['ok']
  local value = ''
  if kind == 'string' then value = redis.call('GET', holder) end
  reply[#reply + 1] = slug
  reply[#reply + 1] = value
  reply[#reply + 1] = tostring(redis.call('PTTL', holder))
  reply[#reply + 1] = redis.call('GET', prefix .. slug .. ':f') or '0'
end
return reply
