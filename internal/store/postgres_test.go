package store_test

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"postern/internal/store"
)

// A backend is a program that answers as PostgreSQL does, as far as it goes.
type backend func(c net.Conn) error

// packet is one message of PostgreSQL's protocol.
func packet(kind byte, body string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4)), body...)
}

func startup(c net.Conn) error {
	var n [4]byte
	if _, err := io.ReadFull(c, n[:]); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(n[:])-4))
	return err
}

func refuse(code, message string) backend {
	return func(c net.Conn) error {
		if err := startup(c); err != nil {
			return err
		}
		_, err := c.Write(packet('E', "SFATAL\x00VFATAL\x00C"+code+"\x00M"+message+"\x00\x00"))
		return err
	}
}

func hangUp(c net.Conn) error {
	if err := startup(c); err != nil {
		return err
	}
	if _, err := c.Write(append(packet('R', "\x00\x00\x00\x00"), packet('Z', "I")...)); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5)) // the first query
	return err
}

// TestNoErrorHoldsThePassword: neither what an error says nor anything that it
// wraps or has in a field has the password of the database.
func TestNoErrorHoldsThePassword(t *testing.T) {
	const password = "s3cr3t/pass:w0rd@x"
	serve := func(t *testing.T, b backend) string {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					_ = b(c)
				}()
			}
		}()
		return l.Addr().String()
	}
	at := func(host, rest string) string {
		return "postgres://" + url.UserPassword("app", password).String() + "@" + host + "/db" + rest
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tt := range []struct {
		name   string
		source func(t *testing.T) string
		ctx    context.Context
		is     error
	}{
		{"a port that is none", func(*testing.T) string { return at("127.0.0.1:port", "") }, nil, nil},
		{"a parameter that is none", func(*testing.T) string { return at("127.0.0.1:1", "?sslmode=maybe") }, nil, nil},
		{"a password that is not escaped", func(*testing.T) string { return "postgres://app:" + password + "@127.0.0.1/db" }, nil, nil},
		{"a password with an @", func(*testing.T) string { return "postgres://app:abc@w0rd@127.0.0.1:1/db?sslmode=disable" }, nil, nil},
		{"a percent sign", func(*testing.T) string { return "postgres://app:%zz" + password + "@127.0.0.1:1/db" }, nil, nil},
		{"a file that is not there", func(*testing.T) string { return at("127.0.0.1:1", "?sslmode=verify-full&sslrootcert=/nowhere") }, nil, nil},
		{"a password as a parameter", func(*testing.T) string {
			return "postgres://app@127.0.0.1:1/db?sslmode=disable&password=" + url.QueryEscape(password)
		}, nil, nil},
		{"nobody listens", func(*testing.T) string { return at("127.0.0.1:1", "?sslmode=disable") }, nil, nil},
		{"several hosts, where nobody listens", func(*testing.T) string { return at("127.0.0.1:1,127.0.0.1:2", "?sslmode=disable") }, nil, nil},
		{"no server of PostgreSQL", func(t *testing.T) string {
			return at(serve(t, func(c net.Conn) error { _, err := c.Write([]byte("220 mx ESMTP\r\n")); return err }), "?sslmode=disable")
		}, nil, nil},
		{"a server without TLS", func(t *testing.T) string {
			return at(serve(t, func(c net.Conn) error { _, err := c.Write([]byte("N")); return err }), "?sslmode=require")
		}, nil, nil},
		{"a wrong password", func(t *testing.T) string {
			return at(serve(t, refuse("28P01", `password authentication failed for user "app"`)), "?sslmode=disable")
		}, nil, nil},
		{"a server that says the password", func(t *testing.T) string {
			return at(serve(t, refuse("28P01", "no, it is not "+password)), "?sslmode=disable")
		}, nil, nil},
		{"a connection that is lost", func(t *testing.T) string { return at(serve(t, hangUp), "?sslmode=disable") }, nil, nil},
		{"the caller has cancelled", func(*testing.T) string { return at("127.0.0.1:1", "?sslmode=disable") }, canceled, context.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := tt.ctx
			if ctx == nil {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
			}
			source := tt.source(t)
			_, err := store.Open(ctx, source, "")
			_, readErr := store.OpenReadOnly(ctx, source)
			for _, err := range []error{err, readErr} {
				if err == nil {
					t.Fatal("there is no error")
				}
				holdsNot(t, err, password)
				if tt.is != nil && !errors.Is(err, tt.is) {
					t.Errorf("%v is no %v", err, tt.is)
				}
			}
			if got := store.Redact(source); holds(got, password) {
				t.Errorf("Redact returns %s", got)
			}
		})
	}
	// What the server answered is still known.
	_, err := store.Open(t.Context(), at(serve(t, refuse("28P01", "no")), "?sslmode=disable"), "")
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != "28P01" {
		t.Errorf("got %v, want the server's code", err)
	}
}

func holds(text, password string) bool {
	for _, form := range []string{
		password, url.PathEscape(password), url.QueryEscape(password), base64.StdEncoding.EncodeToString([]byte(password)), hex.EncodeToString([]byte(password)),
		"w0rd", strings.Trim(fmt.Sprintf("%d", []byte(password)), "[]"),
	} {
		if strings.Contains(text, form) {
			return true
		}
	}
	return false
}

// holdsNot walks all that err wraps, and all fields of each.
func holdsNot(t *testing.T, err error, password string) {
	t.Helper()
	for _, verb := range []string{"%s", "%v", "%+v", "%#v", "%q", "%x"} {
		if s := fmt.Sprintf(verb, err); holds(s, password) {
			t.Errorf("%s of %T tells: %s", verb, err, s)
		}
	}
	seen := map[uintptr]bool{}
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		switch v.Kind() {
		case reflect.Pointer:
			if v.IsNil() || seen[v.Pointer()] {
				return
			}
			seen[v.Pointer()] = true
			walk(v.Elem(), path)
		case reflect.Interface:
			if !v.IsNil() {
				walk(v.Elem(), path)
			}
		case reflect.Struct:
			for i := range v.NumField() {
				walk(v.Field(i), path+"."+v.Type().Field(i).Name)
			}
		case reflect.Slice, reflect.Array:
			for i := range v.Len() {
				walk(v.Index(i), path+"[]")
			}
		case reflect.Map:
			for _, k := range v.MapKeys() {
				walk(k, path+"{}")
				walk(v.MapIndex(k), path+"{}")
			}
		case reflect.String:
			if holds(v.String(), password) {
				t.Errorf("%s tells: %s", path, v.String())
			}
		default: // numbers and functions
		}
	}
	walk(reflect.ValueOf(err), fmt.Sprintf("%T", err))
	switch e := err.(type) { //nolint:errorlint // each layer is checked separately
	case interface{ Unwrap() error }:
		if in := e.Unwrap(); in != nil {
			holdsNot(t, in, password)
		}
	case interface{ Unwrap() []error }:
		for _, in := range e.Unwrap() {
			holdsNot(t, in, password)
		}
	}
}
