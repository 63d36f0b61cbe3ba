# Sends as the tutorials of smtplib do. Arguments: which way, the sender, the recipient.
import smtplib, ssl, sys
from email.message import EmailMessage

way, sender, to = sys.argv[1:]
message = EmailMessage()
message["From"], message["To"], message["Subject"] = sender, to, way
message.set_content(f"sent by {way}\n.a line with a dot\n")
if way == "starttls":
    with smtplib.SMTP("smtp.example.com", 587, timeout=60) as server:
        server.starttls(context=ssl.create_default_context())
        server.login("user@example.com", "pass-of-the-program")
        server.sendmail(sender, to, message.as_string())
elif way == "bytes":
    with smtplib.SMTP("smtp.example.com", 25, timeout=60) as server:
        server.sendmail(sender, to, message.as_bytes())
elif way == "ssl":
    with smtplib.SMTP_SSL("smtp.gmail.com", 465, context=ssl.create_default_context(), timeout=60) as server:
        server.login("user@gmail.com", "pass-of-the-program")
        server.send_message(message)
elif way.startswith("django"):
    from django.conf import settings
    from django.core.mail import send_mail

    secure = {"EMAIL_USE_SSL": True, "EMAIL_PORT": 465} if way == "django-ssl" else {"EMAIL_USE_TLS": True, "EMAIL_PORT": 587}
    settings.configure(EMAIL_HOST="smtp.gmail.com", EMAIL_HOST_USER="user@gmail.com", EMAIL_HOST_PASSWORD="pass-of-the-program", DEFAULT_FROM_EMAIL=sender, **secure)
    assert send_mail(way, f"sent by {way}\n.a line with a dot\n", None, [to]) == 1
