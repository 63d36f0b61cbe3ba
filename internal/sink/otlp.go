package sink

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploghttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	otellog "go.opentelemetry.io/otel/log"
	sdklog "go.opentelemetry.io/otel/sdk/log"
	"go.opentelemetry.io/otel/sdk/resource"

	"postern/internal/audit"
)

// An otlp sends OpenTelemetry log records over HTTP.
type otlp struct {
	options  []otlploghttp.Option
	resource *resource.Resource
	exporter *otlploghttp.Exporter // nil until the first Send
}

var _ target = (*otlp)(nil)

// sendTimeout is how long one request may take.
const sendTimeout = 15 * time.Second

func newOTLP(network string, u *url.URL, conf Config) (*otlp, error) {
	to, headers, client, err := collectorAt(network, u, "/v1/logs", conf.Resolver)
	if err != nil {
		return nil, err
	}
	return &otlp{
		options: []otlploghttp.Option{
			otlploghttp.WithEndpointURL(to), otlploghttp.WithHeaders(headers), otlploghttp.WithCompression(otlploghttp.GzipCompression),
			otlploghttp.WithTimeout(sendTimeout), otlploghttp.WithHTTPClient(client),
			// The forwarder retries, since it has the cursor.
			otlploghttp.WithRetry(otlploghttp.RetryConfig{Enabled: false}),
		},
		resource: resource.NewSchemaless(attribute.String("service.name", "postern"), attribute.String("service.version", conf.Version), attribute.String("host.name", conf.Host)),
	}, nil
}

// Spans returns an exporter of spans to the collector at raw:
//
//	otlp+http://host:4318       otlp+https://host:4318/v1/traces?ca=FILE&headers=FILE
//
// A nil resolver means the system's. Nothing is sent before the first span.
func Spans(ctx context.Context, raw string, resolver *net.Resolver) (*otlptrace.Exporter, error) {
	to, headers, client, err := spanCollector(raw, resolver)
	if err != nil {
		return nil, err
	}
	return otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(to), otlptracehttp.WithHeaders(headers),
		otlptracehttp.WithCompression(otlptracehttp.GzipCompression), otlptracehttp.WithTimeout(sendTimeout), otlptracehttp.WithHTTPClient(client))
}

// CheckSpans returns an error unless raw is a URL for [Spans].
func CheckSpans(raw string) error {
	_, _, _, err := spanCollector(raw, nil)
	return err
}

func spanCollector(raw string, resolver *net.Resolver) (to string, headers map[string]string, client *http.Client, err error) {
	u, err := url.Parse(raw)
	if err != nil {
		return "", nil, nil, errors.New("the URL cannot be read") // url.Error would quote it
	}
	network, ok := strings.CutPrefix(u.Scheme, "otlp+")
	if !ok {
		return "", nil, nil, fmt.Errorf("scheme %q: want otlp+http://host:4318 or otlp+https://host:4318", u.Scheme)
	}
	if u.User != nil || u.Fragment != "" {
		return "", nil, nil, errors.New("no name, password or fragment belongs into the URL; headers=FILE holds what is secret")
	}
	for k := range u.Query() {
		if k != "headers" && (k != "ca" || network != "https") {
			return "", nil, nil, fmt.Errorf("%s is no setting of %s", k, u.Scheme)
		}
	}
	return collectorAt(network, u, "/v1/traces", resolver)
}

// collectorAt returns how to reach an OpenTelemetry collector. A URL without a path
// means the path usual.
func collectorAt(network string, u *url.URL, usual string, resolver *net.Resolver) (to string, headers map[string]string, client *http.Client, err error) {
	if network != "http" && network != "https" || u.Host == "" {
		return "", nil, nil, errors.New("sink otlp: want otlp+http://host:4318 or otlp+https://host:4318")
	}
	at := url.URL{Scheme: network, Host: u.Host, Path: u.Path}
	if at.Path == "" || at.Path == "/" {
		at.Path = usual
	}
	if headers, err = readHeaders(u.Query().Get("headers")); err != nil {
		return "", nil, nil, err
	}
	transport := &http.Transport{
		Proxy:       http.ProxyFromEnvironment,
		DialContext: (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second, Resolver: resolver}).DialContext,
		// One connection: requests go one after another.
		MaxIdleConns: 1, IdleConnTimeout: 90 * time.Second, TLSHandshakeTimeout: 10 * time.Second, ForceAttemptHTTP2: true,
	}
	if network == "https" {
		if transport.TLSClientConfig, err = tlsConfig(u.Query()); err != nil {
			return "", nil, nil, err
		}
	}
	return at.String(), headers, &http.Client{Transport: transport, Timeout: sendTimeout}, nil
}

// readHeaders reads a file of "Name: value" lines. Secrets are read from a file, since
// every user of the machine can read command lines.
func readHeaders(file string) (map[string]string, error) {
	out := map[string]string{}
	if file == "" {
		return out, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("sink: headers: %w", err)
	}
	h, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(append(bytes.TrimSpace(b), "\r\n\r\n"...)))).ReadMIMEHeader()
	if err != nil {
		return nil, fmt.Errorf("sink: headers: %s: want lines such as Authorization: Bearer …", file)
	}
	for k, v := range h {
		out[k] = strings.Join(v, ", ")
	}
	return out, nil
}

// A collector collects the records that a logger emits. The SDK offers no other way to
// make a record with a resource and a scope.
type collector struct{ list []sdklog.Record }

var _ sdklog.Processor = (*collector)(nil)

// Enabled implements [sdklog.Processor].
func (*collector) Enabled(context.Context, sdklog.EnabledParameters) bool { return true }

// OnEmit implements [sdklog.Processor].
func (c *collector) OnEmit(_ context.Context, r *sdklog.Record) error {
	c.list = append(c.list, r.Clone())
	return nil
}

// Shutdown implements [sdklog.Processor].
func (*collector) Shutdown(context.Context) error { return nil }

// ForceFlush implements [sdklog.Processor].
func (*collector) ForceFlush(context.Context) error { return nil }

// Send implements [target].
func (o *otlp) Send(ctx context.Context, list []Record) (err error) {
	if o.exporter == nil {
		if o.exporter, err = otlploghttp.New(ctx, o.options...); err != nil {
			return fmt.Errorf("send to otlp: %w", err)
		}
	}
	c := &collector{}
	// No limits: a truncated value would not match the entry's hash.
	provider := sdklog.NewLoggerProvider(sdklog.WithResource(o.resource), sdklog.WithProcessor(c), sdklog.WithAttributeCountLimit(-1), sdklog.WithAttributeValueLengthLimit(-1))
	logger := provider.Logger("postern/internal/audit")
	for _, r := range list {
		rec, err := record(r)
		if err != nil {
			return err
		}
		logger.Emit(ctx, rec)
	}
	err = o.exporter.Export(ctx, c.list)
	// The library has no typed error for a partial success, which means that the
	// receiver has rejected some records and that a retry is forbidden.
	if err != nil && strings.Contains(err.Error(), "OTLP partial success") {
		return fmt.Errorf("%w: %w", errRejected, err)
	}
	if err != nil {
		return fmt.Errorf("send to otlp: %w", err)
	}
	return nil
}

// record converts an entry to a log record. Its body is the entry as a line of an
// export, so that a receiver can verify it.
func record(r Record) (out otellog.Record, err error) {
	line, err := audit.MarshalLine(r.Entry, r.Hash)
	if err != nil {
		return out, err
	}
	out.SetTimestamp(r.At)
	out.SetObservedTimestamp(r.At)
	out.SetEventName("postern." + string(r.Verb))
	switch r.Verb.Severity() {
	case audit.Error:
		out.SetSeverity(otellog.SeverityError)
	case audit.Warning:
		out.SetSeverity(otellog.SeverityWarn)
	case audit.Notice:
		out.SetSeverity(otellog.SeverityInfo2)
	case audit.Info:
		out.SetSeverity(otellog.SeverityInfo)
	}
	out.SetBody(attribute.StringValue(string(line)))
	out.AddAttributes(
		attribute.Int64("postern.seq", r.Seq), attribute.String("postern.project", r.Project), attribute.String("postern.actor", r.Actor),
		attribute.String("postern.verb", string(r.Verb)), attribute.String("postern.object", r.Object), attribute.String("postern.hash", hex.EncodeToString(r.Hash[:])),
	)
	var f audit.Fields
	if json.Unmarshal([]byte(r.Detail), &f) != nil {
		f = audit.Fields{"text": r.Detail}
	}
	for _, k := range slices.Sorted(maps.Keys(f)) {
		out.AddAttributes(attribute.String("postern.detail."+k, strings.ToValidUTF8(f[k], "\uFFFD")))
	}
	return out, nil
}

// Close implements [target]. It does nothing: HTTP requests are independent, so a failed
// one leaves no connection in an undefined state.
func (o *otlp) Close() error { return nil }
