// Limits requests with Tidegate's HTTP API. The API is called in a subrequest, so that nginx keeps
// its connections to Tidegate open.

const FIELDS = ['RateLimit-Policy', 'RateLimit', 'Retry-After'];

// nginx may use only one of several values, and the application another one.
function has_several_values(r, name) {
    return r.rawHeadersIn.filter(header => header[0].toLowerCase() === name).length > 1;
}

function entries(r) {
    const all = {
        ip: r.remoteAddress,
        method: r.method,
        path: r.variables.request_uri,
        host: r.variables.host,
        customer: r.variables.customer,
    };
    // As for other proxies, an empty value is absent.
    Object.keys(all).filter(name => !all[name]).forEach(name => delete all[name]);
    return all;
}

async function limit(r) {
    if (has_several_values(r, 'x-api-key')) {
        r.return(400, 'the header X-Api-Key has several values\n');
        return;
    }
    const body = JSON.stringify({entries: entries(r)});
    const verdict = await r.subrequest('/_tidegate', {method: 'POST', body});
    FIELDS.filter(name => verdict.headersOut[name])
        .forEach(name => r.headersOut[name] = verdict.headersOut[name]);
    switch (verdict.status) {
    case 200:
        r.internalRedirect('@application');
        return;
    case 400:
        r.return(400, verdict.responseText);
        return;
    case 429:
        r.return(429, 'Too many requests\n');
        return;
    case 503:
        // Tidegate has decided that the service has no capacity; without a reply, nginx has 502
        // or 504.
        r.return(503, 'The service is at its capacity\n');
        return;
    default:
        r.error(`Tidegate: status ${verdict.status}; the request passes`);
        r.internalRedirect('@application');
    }
}

export default {limit};
