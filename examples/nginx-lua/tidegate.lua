-- Asks Tidegate over the Redis protocol, on pooled connections (cosockets of ngx_http_lua_module).

local tidegate = {}

-- Timeouts in milliseconds: to connect, to send and to read.
local CONNECT, SEND, READ = 100, 250, 250

-- The pool of each nginx worker: idle time of a connection in milliseconds, and connections.
local IDLE, POOL = 60000, 32

-- The longest line and the most elements of a reply, which is from Tidegate.
local MAX_ELEMENTS = 16

local function encoded(arguments)
    local parts = { "*" .. #arguments .. "\r\n" }
    for _, argument in ipairs(arguments) do
        parts[#parts + 1] = "$" .. #argument .. "\r\n" .. argument .. "\r\n"
    end
    return table.concat(parts)
end

-- Returns true if an error reply is about the request. Other errors, such as NOAUTH or a connection
-- limit, are about the connection or the configuration.
local function is_about_request(reply)
    return reply:find("^ERR entries[.:]") ~= nil or reply:find("^ERR key:") ~= nil
end

-- Reads a reply. Returns a value, or nil and a problem. The third result is true if the problem is
-- an error reply about the request, after which the connection can be used again.
local function read(socket)
    local line, problem = socket:receive("*l")
    if not line then
        return nil, problem
    end
    local kind, rest = line:sub(1, 1), line:sub(2)
    if kind == "-" then
        return nil, rest, is_about_request(rest)
    elseif kind == ":" then
        return tonumber(rest)
    elseif kind == "$" then
        local length = tonumber(rest)
        if length < 0 then
            return ngx.null
        end
        local text, problem = socket:receive(length + 2)
        return text and text:sub(1, length), problem
    elseif kind == "*" and tonumber(rest) <= MAX_ELEMENTS then
        local elements = {}
        for index = 1, tonumber(rest) do
            local element, problem = read(socket)
            if element == nil then
                return nil, problem
            end
            elements[index] = element
        end
        return elements
    end
    return nil, "unexpected reply " .. line
end

-- Decides a request with these entries. Returns the verdict, or nil and a problem. The third result
-- is true if Tidegate has rejected the request, for example because its path is ambiguous.
function tidegate.check(host, port, entries)
    local arguments = { "TIDEGATE.CHECK" }
    for name, value in pairs(entries) do
        -- As for other proxies, an empty value is absent.
        if value ~= "" then
            arguments[#arguments + 1] = name
            arguments[#arguments + 1] = value
        end
    end
    local socket = ngx.socket.tcp()
    socket:settimeouts(CONNECT, SEND, READ)
    local connected, problem = socket:connect(host, port)
    if not connected then
        return nil, problem
    end
    local sent, problem = socket:send(encoded(arguments))
    if not sent then
        return nil, problem
    end
    local reply, problem, is_rejected = read(socket)
    if reply == nil and not is_rejected then
        socket:close()
        return nil, problem
    end
    socket:setkeepalive(IDLE, POOL)
    if is_rejected then
        return nil, problem, true
    end
    return {
        allowed = reply[1] == 1,
        rule = reply[2],
        limit = reply[3],
        remaining = reply[4],
        reset_after_ms = reply[5],
        retry_after_ms = reply[6],
    }
end

-- Ends the current request with 400 if it has several values of the header `name`, because nginx
-- and the application could use different ones. nginx itself joins the lines of a header with
-- commas.
function tidegate.require_one_value(name)
    local value = ngx.req.get_headers(0)[name]
    if type(value) == "table" or (value or ""):find(",", 1, true) then
        return ngx.exit(ngx.HTTP_BAD_REQUEST)
    end
end

-- Ends the current request with 429 if it is denied, and with 400 if it is rejected. If Tidegate
-- does not decide the request, the request passes.
function tidegate.limit(host, port, entries)
    local verdict, problem, is_rejected = tidegate.check(host, port, entries)
    if is_rejected then
        ngx.log(ngx.NOTICE, "Tidegate rejected the request: ", problem)
        return ngx.exit(ngx.HTTP_BAD_REQUEST)
    elseif not verdict then
        ngx.log(ngx.ERR, "Tidegate did not decide, so the request passes: ", problem)
        return
    end
    -- A limit of -1 means that no rule applies.
    if verdict.limit >= 0 then
        ngx.header["X-RateLimit-Limit"] = verdict.limit
        ngx.header["X-RateLimit-Remaining"] = verdict.remaining
        ngx.header["X-RateLimit-Reset"] = math.ceil(verdict.reset_after_ms / 1000)
    end
    if not verdict.allowed then
        -- A retry after -1 ms never succeeds.
        if verdict.retry_after_ms >= 0 then
            ngx.header["Retry-After"] = math.ceil(verdict.retry_after_ms / 1000)
        end
        return ngx.exit(ngx.HTTP_TOO_MANY_REQUESTS)
    end
end

return tidegate
