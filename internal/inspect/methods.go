package inspect

import (
	"context"
	"errors"
	"io"
	"net/http"

	"postern/internal/outgoing"
)

// errMethod ends a request whose body names another method after what was judged.
var errMethod = errors.New("the body has more than what was judged")

// readMethods reads what the body of a form says about methods, where a rule or a permit
// is about them. The attack: a permit for POST, and a form with _method=DELETE, which
// Rails, Laravel, Symfony and others obey. A body that is too long to be read first is
// read while it leaves, and must not name another method than that of the request line.
func (x *exchange) readMethods(ctx context.Context) *refusal {
	if x.upgrade || outgoing.NewMethodScan(x.r) == nil || !x.byMethod(ctx) {
		return nil
	}
	if bad := x.fill(ctx, maxLook); bad != nil {
		return bad
	}
	if x.r.Whole {
		x.r.ReadMethods()
		return nil
	}
	scan := outgoing.NewMethodScan(x.r)
	_, _ = scan.Write(x.prefix)
	if why := scan.Problem(); why != "" {
		return methodProblem(why)
	}
	x.r.Watched = true
	return nil
}

// byMethod reports whether the request is judged by its method.
func (x *exchange) byMethod(ctx context.Context) bool {
	j, ok := x.s.l.in.cfg.Judge.(MethodJudge)
	return x.s.conn.Restrict != nil || x.only != nil && len(x.only.Methods) > 0 || ok && j.ByMethod(ctx, x.s.l.who, x.r)
}

func methodProblem(why string) *refusal {
	r := denied("a rule or a permit is about the method, and a server could read another one from the request: " + why)
	r.next = "Send the request with the method that is meant, and without a field that names another one. A long body must be plain."
	return r
}

// watched returns a body that ends before a field in it that names another method.
func (x *exchange) watched(body io.Reader) io.Reader {
	if !x.r.Watched || x.r.Whole || body == http.NoBody {
		return body
	}
	return &methodWatch{x: x, r: body, scan: outgoing.NewMethodScan(x.r)}
}

// A methodWatch ends a body where it names another method.
type methodWatch struct {
	x    *exchange
	r    io.Reader
	scan *outgoing.MethodScan
}

// Read implements [io.Reader].
func (w *methodWatch) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	_, _ = w.scan.Write(p[:n])
	if errors.Is(err, io.EOF) {
		w.scan.End()
	}
	if why := w.scan.Problem(); why != "" {
		w.x.mu.Lock()
		w.x.method = why
		w.x.mu.Unlock()
		return 0, errMethod
	}
	return n, err
}
