-- Sends checks (mode "check"), or pairs of a reservation and its settlement (mode "pair"), for
-- random keys. The arguments are the mode and the number of keys.

local threads = 0

function setup(thread)
   thread:set("number", threads)
   threads = threads + 1
end

function init(arguments)
   local mode, keys = arguments[1], tonumber(arguments[2])
   math.randomseed(number + 1)
   wrk.method = "POST"
   wrk.headers["Content-Type"] = "application/json"
   local path = mode == "check" and "/v1/check" or "/v1/reserve"
   requests, tokens = {}, {}
   for key = 0, keys - 1 do
      local body = string.format('{"entries": {"user": "user-%012d"}, "cost": 3}', key)
      requests[#requests + 1] = wrk.format(nil, path, nil, body)
   end
   if mode == "check" then
      response = nil
   end
end

function request()
   local token = table.remove(tokens)
   if token == nil then
      return requests[math.random(#requests)]
   end
   return wrk.format(nil, "/v1/settle", nil, '{"reservation": "' .. token .. '", "cost": 1}')
end

-- A reservation can be settled over any connection.
function response(status, headers, body)
   local token = body:match('"reservation":"([^"]+)"')
   if token ~= nil then
      tokens[#tokens + 1] = token
   end
end
