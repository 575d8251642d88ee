from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path
from django.views.generic import RedirectView

from . import views

urlpatterns = [
    path("", views.front, name="front"),
    path("buy/<str:sku>/", views.checkout, name="checkout"),
    path("import/", views.start_import, name="start-import"),
    path("favicon.ico", RedirectView.as_view(url="/static/shop/icon.svg")),
    path("login/", LoginView.as_view(template_name="shop/login.html"), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
]
