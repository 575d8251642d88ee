-- Report locks: the names given, with those that wait for them, or one page of the index in the order of expiry; with
-- the first page, why the node would refuse to write.
-- KEYS: index. ARGV: prefix, offset, count, waiters to report at most, then slugs
local prefix, offset, size, cap = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
local slugs = {}
for i = 5, #ARGV do slugs[#slugs + 1] = ARGV[i] end
if size > 0 then slugs = redis.call('ZRANGE', KEYS[1], offset, offset + size - 1) end

-- Those whose enrolment is over died, or gave up without saying so.
local function waiters(slug)
  local base = prefix .. (string.match(slug, '^(.+)#%d+$') or slug)
  local enrolled = redis.pcall('ZRANGEBYSCORE', base .. ':s', '(' .. now_ms, '+inf', 'LIMIT', 0, cap)
  local alive, said = {}, {}
  for _, waiter in ipairs(enrolled) do alive[waiter] = true end
  if #enrolled > 0 then
    for _, waiter in ipairs(redis.pcall('ZRANGE', base .. ':q', 0, -1)) do
      if alive[waiter] then said[#said + 1] = waiter end
    end
  end
  return table.concat(said, ' ')
end

-- One command for all values: most of what a page costs is the number of its commands. A key of another type counts
-- as an empty one.
local keys, cells = {}, {}
for i, slug in ipairs(slugs) do
  keys[2 * i - 1], keys[2 * i] = prefix .. slug .. ':h', prefix .. slug .. ':f'
end
local values = {}
for first = 1, #keys, 1000 do -- Lua takes some thousand arguments at most
  for _, value in ipairs(redis.call('MGET', unpack(keys, first, math.min(first + 999, #keys)))) do
    values[#values + 1] = value
  end
end
for i, slug in ipairs(slugs) do
  local at = 5 * i
  cells[at - 4], cells[at - 3], cells[at - 2] = slug, values[2 * i - 1] or '', redis.call('PTTL', keys[2 * i - 1])
  cells[at - 1], cells[at] = values[2 * i] or '0', size > 0 and '' or waiters(slug)
end
-- A node can answer and yet refuse to write: it is full, or has lost its disk, its replicas or a right.
local refused = ''
if size > 0 and offset == 0 then refused = redis.pcall('SET', prefix .. 'x:probe', '1', 'PX', 1).err or '' end
-- One string, because a client takes longer to read hundreds of them than the server to find them.
return {'LISTED', '0', stamp, tostring(redis.call('ZCARD', KEYS[1])), #cells > 0 and cjson.encode(cells) or '[]', refused}
