import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Client asks a server with Java's own HTTP client, as TestClientsTrustTheWall wants. */
public class Client {
    public static void main(String[] args) throws Exception {
        HttpClient c = HttpClient.newHttpClient();
        HttpRequest get = HttpRequest.newBuilder(URI.create(args[0])).build();
        HttpRequest post = HttpRequest.newBuilder(URI.create(args[0])).POST(HttpRequest.BodyPublishers.ofString(args[1])).build();
        System.out.println("GET " + c.send(get, HttpResponse.BodyHandlers.ofString()).statusCode());
        System.out.println("POST " + c.send(post, HttpResponse.BodyHandlers.ofString()).statusCode());
    }
}
