// Limits requests with Tidegate's HTTP API. The API is called in a subrequest, so that nginx keeps
// its connections to Tidegate open.

const FIELDS = ['RateLimit-Policy', 'RateLimit', 'Retry-After'];

// If a header has several values, nginx and the application may use different ones.
function has_several_values(r, name) {
    return r.rawHeadersIn.filter(header => header[0].toLowerCase() === name).length > 1;
}

function entries(r) {
    const all = {
        ip: r.remoteAddress,
        method: r.method,
        path: r.variables.request_uri,
        customer: r.variables.customer,
    };
    // An empty value counts as absent, as with other proxies.
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
        // Tidegate has denied the request: the service is at its capacity, or the store cannot
        // decide. If Tidegate does not reply, the status of the subrequest is 502 or 504.
        r.return(503, 'The service cannot accept the request now\n');
        return;
    default:
        r.error(`Tidegate: status ${verdict.status}; the request passes`);
        r.internalRedirect('@application');
    }
}

export default {limit};
