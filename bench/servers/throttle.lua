-- Asks for one of many keys at random, or, to spend them all, for one after the other.
-- Arguments: the JSON body with KEY in the key's place, and perhaps UNITS in that of the cost; the number of keys; "random" or "each".

local threads = 0

function setup(thread)
   thread:set("number", threads)
   threads = threads + 1
end

function init(arguments)
   local template, keys, mode = arguments[1], tonumber(arguments[2]), arguments[3]
   math.randomseed(number + 1)
   wrk.method = "POST"
   wrk.headers["Content-Type"] = "application/json"
   requests = {}
   for key = 0, keys - 1 do
      -- The requests are made beforehand, so that the generator leaves the processor to the server.
      local body = template:gsub("KEY", string.format("%012d", key)):gsub("UNITS", key % 500 + 1)
      requests[#requests + 1] = wrk.format(nil, nil, nil, body)
   end
   -- Each thread begins at its own half, and both come round to all.
   turn = mode == "each" and number * math.floor(keys / 2) or nil
end

function request()
   if turn == nil then
      return requests[math.random(#requests)]
   end
   turn = turn % #requests + 1
   return requests[turn]
end
