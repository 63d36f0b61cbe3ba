package e2bapi

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

// TestInterimResponsesAreCleaned: the headers of interim responses are cleaned like
// those of the final one.
func TestInterimResponsesAreCleaned(t *testing.T) {
	service := raw(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 4096))
		_, _ = io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nSet-Cookie: a=b; Domain=test\r\nClear-Site-Data: \"*\"\r\n\r\n"+
			"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		c.Close()
	})
	s := serveData(t, Config{}, map[uint16]string{8000: service})
	for _, c := range []struct {
		name, host, more, cookie string
	}{
		{"a name of its own", "8000-" + testID + ".x.test", "", "Set-Cookie: a=b\r\n"},
		{"this server's", "localhost", idHeader + ": " + testID + "\r\n" + portHeader + ": 8000\r\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := net.Dial("tcp", s.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nE2b-Traffic-Access-Token: traffic-%s\r\n%sConnection: close\r\n\r\n", c.host, testID, c.more)
			b, err := io.ReadAll(bufio.NewReader(conn))
			interim, answer, ok := strings.Cut(string(b), "\r\n\r\n")
			interim += "\r\n"
			if err != nil || !ok || !strings.HasPrefix(interim, "HTTP/1.1 103") || !strings.HasPrefix(answer, "HTTP/1.1 200") {
				t.Fatalf("got %q, %v", b, err)
			}
			if strings.Contains(interim, "Clear-Site-Data") || strings.Contains(interim, "Set-Cookie") != (c.cookie != "") || !strings.Contains(interim, c.cookie) {
				t.Errorf("the interim answer is %q, want of cookies %q", interim, c.cookie)
			}
		})
	}
}
